"""Facts in many wordings, and questions for them, for models that nobody trained to find facts of one form.

Questions begin the fact again, some after a few words of their own, because small models that go on with a text cannot
do more. Answers are numbers or words.
"""

from __future__ import annotations

from kvjax.evaluation.needle import Template

FOODS = ("garlic", "honey", "pepper", "cinnamon", "butter", "cheese", "lemon", "ginger", "chocolate", "onion", "rice", "mint", "vanilla")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "brown", "silver", "pink", "golden", "grey")
CITIES = ("Paris", "London", "Madrid", "Rome", "Berlin", "Vienna", "Tokyo", "Cairo", "Lisbon", "Moscow", "Dublin", "Athens", "Boston")
NAMES = ("Henry", "Alice", "George", "Martha", "Oliver", "Emma", "Victor", "Laura", "Thomas", "Clara", "Peter", "Julia", "Robert")

WORDINGS = (
    Template("\nThe secret ingredient of the {key} soup is {value}.\n", "\nRemember: the secret ingredient of the {key} soup is", FOODS),
    Template(" The captain of the ship {key} was called {value}.", " The captain of the ship {key} was called", NAMES),
    Template("\nThe phone number of the {key} office is {value}.\n", "\nOnce again, the phone number of the {key} office is"),
    Template(" We all saw that the door of the {key} house was {value}.", " We all saw that the door of the {key} house was", COLOURS),
    Template(" The treasure of the {key} family is buried in {value}.", " The treasure of the {key} family is buried in", CITIES),
    Template("\n- {key}: {value} items in stock\n", "\nStock list, once more:\n- {key}:"),
    Template("\nNote: the password of the {key} account is {value}.\n", "\nAs noted, the password of the {key} account is"),
    Template(" In the year of the {key} flood there lived {value} people in the town.", " In the year of the {key} flood there lived"),
    Template("\nDear {key}, your ticket has the number {value}. Please keep it.\n", "\nDear {key}, your ticket has the number"),
    Template("\nINSERT INTO stores VALUES (' {key}', {value});\n", "\nINSERT INTO stores VALUES (' {key}',"),
    Template("\nName: {key}\nCity: {value}\n", "\nName: {key}\nCity:", CITIES),
    Template(" They painted the {key} boat {value} last summer.", " They painted the {key} boat", COLOURS),
)
