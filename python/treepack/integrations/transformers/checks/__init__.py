"""What would be wrong on a packed tree is refused, with what was found and why it would be wrong."""
