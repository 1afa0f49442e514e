"""What a configuration needs on a cluster of any size, worked out in one process that allocates nothing."""
