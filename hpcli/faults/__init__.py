"""Known faults, one a file in ``known``, found by being there.

``ENTRY`` (see :class:`hpcli.faults.entry.Entry`) shows a fault in its smallest form, beside this library: ``hpcli repro``. ``FAULT``
(see :class:`hpcli.faults.fault.Fault`) with ``patch`` plants it into a training step, which must fail: ``hpcli check-norm --inject``.
"""
