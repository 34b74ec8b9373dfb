"""Doctor: is this laptop fit to operate, and what to mend where it is not."""
