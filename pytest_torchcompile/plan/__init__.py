"""From a YAML file to planned cells, with ``file:line:column`` for every mistake. Plain data, no torch.

To read in this order: ``matrix_path`` (which file is meant), ``nodes`` and ``reader`` (YAML, and values out of it),
``models``, ``axes`` and ``rules`` (a section of the file each; ``targets`` tells whether the code that they name is
there), ``expansion`` (axes times axes, and what the rules say of each cell) and ``matrix``, which calls them all.
``selection`` is which of the cells run: the section ``strategy``, shards, and what was asked for by name; ``markers``
are the matrix of a single test, and ``matrix_schema`` is for editors.
"""
