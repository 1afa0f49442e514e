"""The gradient norm on PyTorch.

The life of one norm: ``plan`` knows what each rank must hold and finds this step's gradients, ``local`` measures what
this rank holds, ``combine`` lets the ranks tell each other and conclude.
"""
