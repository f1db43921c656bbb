"""Confirms the page torch-2-12-1-to-2-13-0-smoke.md with torch alone: run it by the Python of each environment."""

import re

import torch
from torch._inductor.utils import run_and_get_code

print("torch", torch.__version__)


class Head(torch.nn.Module):
    """As the matrix' tiny_head: two linear layers and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(24, 48), torch.nn.Linear(48, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shares of twelve."""
        return torch.softmax(self.down(torch.relu(self.up(x))), -1)


torch.manual_seed(0)
model = Head()


def step(x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the parameters, compiled."""
    model.zero_grad()
    loss = torch.compile(model)(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


batch = torch.randn(4, 24)
gradients, codes = run_and_get_code(step, batch)
model.zero_grad()
model(batch).square().sum().backward()
for (name, parameter), compiled in zip(model.named_parameters(), gradients, strict=True):
    error = (parameter.grad - compiled).abs().max().item()
    print(f"gradient of {name}: differs from eager by {error:.1e}")
for code in codes:
    for kernel in re.findall(r"'''(.*?)'''", code, flags=re.DOTALL):
        lines = [line.strip() for line in kernel.splitlines() if "integer_div_error" in line]
        print(len(kernel.splitlines()), "lines in a kernel; of them:", lines or "none with integer_div_error")
report = torch._dynamo.explain(model)(batch)
print("graphs:", report.graph_count, "graph breaks:", report.graph_break_count)
