"""Pictures of simulations as SVG text: what people look at. May not know: files."""
