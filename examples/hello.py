"""Two handlers, the smallest whole app: `millstream up --app hello:app`, started in this folder."""

import asyncio

import msgspec

from millstream import App, Context, Fatal

app = App("hello")


class Person(msgspec.Struct):
    name: str
    wait_s: float = 0.0


@app.task("hello.greet")
async def greet(ctx: Context, person: Person) -> str:
    """Greets, after a while if asked to. A payload that does not fit `Person` never gets here."""
    if not person.name.strip():
        raise Fatal("nobody to greet")  # no other attempt can help: straight to the dead-letter queue
    for second in range(int(person.wait_s)):
        ctx.progress(second / person.wait_s, f"{person.wait_s - second:g} s to go")
        await asyncio.sleep(1)
    return f"Hello, {person.name}!"


@app.task("hello.add")
def add(numbers: list[float]) -> float:
    """A plain function is a handler too; it runs in a thread."""
    return sum(numbers)
