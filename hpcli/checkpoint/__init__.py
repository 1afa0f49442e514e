"""Checkpoints: a folder of safetensors files beside one JSON file, complete or not there at all."""
