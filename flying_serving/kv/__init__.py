"""Block lending: a group's blocks are its members' physical blocks (design section 3)."""
