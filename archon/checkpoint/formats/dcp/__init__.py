"""Folders of torch.distributed.checkpoint (DCP): reading them without unpickling anything, and writing them."""
