"""What a run is measured by: spans, collectives, memory and the results made of them."""
