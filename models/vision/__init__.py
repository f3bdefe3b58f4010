"""Vision encoders: from image patches to hidden states of the decoder."""
