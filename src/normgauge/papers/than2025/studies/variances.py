"""S2 Figures 2 and 3: variances before normalizers or activations, their product, and what rescaling does to it."""

from normgauge.papers.language import register
from normgauge.papers.than2025.studies._printed_products import train_and_watch

register("variances")(train_and_watch)
