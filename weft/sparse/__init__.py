"""Sparse attention by name: rules, mask producers and the masks kept between denoising steps."""
