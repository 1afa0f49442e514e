"""Rules shared by every platform, in plain Python: no framework is imported here."""
