"""Systems of other papers, and the parts that they need beside our own."""
