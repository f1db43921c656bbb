"""The HTML page of reports: heat map, findings, each cell's article. No torch, no template library, no network.

To read in this order:

``document``: the whole page, the legend, the choices, the marks of a baseline, the data for its script, and the command
``markup``: letters and colours, elements whose text is escaped, the pieces made of them
``heatmap``: which axes come first, the table of squares
``article``, ``ledger_tables``: everything about one cell
``overview``: what the gate says, tests, pass rates, the run
``svg``, ``models_table``: the map alone as a picture, the models as a table of Markdown

``page.js`` sorts, filters and colours; without it the page is complete. ``page.css`` has what no theme
changes.
"""
