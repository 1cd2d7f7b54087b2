"""Questions about a saved plan: why a layout was chosen, what another one costs, how robust the plan is, whether it is still good."""
