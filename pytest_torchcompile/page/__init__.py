"""The page that people look at: one HTML file that needs no network, and the heat map alone as SVG. No torch."""
