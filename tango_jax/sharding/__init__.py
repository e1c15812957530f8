"""Where arrays lie: mesh settings and devices in; placements, shardings and collectives out."""
