"""Read and write folders of torch.distributed.checkpoint (DCP), without unpickling."""
