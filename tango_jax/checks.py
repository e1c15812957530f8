"""The checks that validation is made of: each raises ValueError with the name of the key, its value and the limit."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def one_of(name: str, value, choices) -> None:
    require(value in choices, f"{name}={value!r} is not one of {', '.join(choices)}")


def at_least(name: str, value, limit) -> None:
    require(value >= limit, f"{name}={value} must be at least {limit}")


def within(name: str, value, low, high) -> None:
    require(low <= value <= high, f"{name}={value} must lie between {low} and {high}")
