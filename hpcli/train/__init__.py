"""The training run: the parent's part (run), each rank's part (loop), and what differs by platform (torch_engine)."""
