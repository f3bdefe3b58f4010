"""Towers that turn the patches of images into rows of the decoder's residual stream."""
