"""What is asked: devices and clusters, models, training, software, the plan, and the rules between them."""
