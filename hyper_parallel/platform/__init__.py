"""One sub-package per framework. Each builds on ``hyper_parallel.core`` and is imported only when it is used."""
