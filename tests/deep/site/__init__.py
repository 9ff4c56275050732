"""The site of docs/, in a browser. Its tools are not in the environment of the other tests: `make
test-docs` has them.
"""
