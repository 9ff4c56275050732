"""The live view.

- `rolling.py`: times and tokens of the last seconds, kept while the view is open.
- `page.py`: its page, one HTML document.
"""
