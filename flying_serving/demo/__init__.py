"""The demo and the tiny random models that it and the tests run on."""
