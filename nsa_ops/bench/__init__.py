"""Benches on a pod: run them, keep what they found, and draw it."""
