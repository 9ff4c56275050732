"""One resident copy of the weights, shared by all lanes of an engine (the paper's Model Weights
Manager).
"""
