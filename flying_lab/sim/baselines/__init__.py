"""Systems of other papers, and what they need beside the parts of our own."""
