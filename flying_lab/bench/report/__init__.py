"""Results of `flying-serving bench` as figures and as one page. Pure functions of the tables that
bench has kept.
"""
