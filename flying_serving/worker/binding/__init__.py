"""One resident copy of the weights, which all lanes of an engine share (the paper's Model Weights
Manager).
"""
