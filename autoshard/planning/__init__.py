"""From a graph, a mesh and the user's demands (pins, limits, kept layouts) to a plan with its proof."""
