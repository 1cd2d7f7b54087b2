"""The cheapest route from layout to layout; the route that is priced is the route that is executed."""

from .routes import Route as Route
from .routes import Routes as Routes
from .routes import Step as Step
from .routes import route as route
from .routes import seconds_table as seconds_table
