"""weft's own small text-to-video model: the transformer, its captions, data sets, judges and weights."""
