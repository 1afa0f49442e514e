"""Measurements of what the project promises about speed, each beside what it is compared with, in one run.

    python -m bench [start|steps|norm] [--json]
"""
