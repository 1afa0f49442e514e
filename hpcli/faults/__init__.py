"""Known faults, one a file: the rule that each reverts, the layout that carries it, what it must be diagnosed as.

To add one, put a module beside the others that defines ``FAULT`` (see :class:`hpcli.faults.fault.Fault`) and ``patch``.
"""
