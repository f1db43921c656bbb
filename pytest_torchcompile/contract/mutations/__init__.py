"""What a caller may do otherwise, one dimension a file: see ``contract/mutation.py``.

The functions that act go into scripts as they stand here. So they import nothing of ours.
"""
