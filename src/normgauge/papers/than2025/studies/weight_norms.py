"""S2 Figures 1 and 3: norms of weights over training, their product, and what rescaling does to it."""

from normgauge.papers.language import register
from normgauge.papers.than2025.studies._printed_products import train_and_watch

register("weight-norms")(train_and_watch)
