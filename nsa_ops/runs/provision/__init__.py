"""Provision: bring a bare machine to where a run can be launched on it, step by step."""
