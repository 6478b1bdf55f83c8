"""A page in a real browser: where things lie on its canvas, and what colour they have."""

import treepack

# One prompt of 8 tokens and three answers, of which two share four of their tokens: segments of 8, 6, 4, 2 and 4 tokens
# in order of arrival, by eye:
#
#   prompt, 8 tokens, 3 samples | A, 6 trained, 1 sample
#                               | B, 4 trained, 2 samples | C, 2 prompt, 1 sample
#                                                         | D, 4 trained, 1 sample
SMALL = [
    {"input_ids": [*range(8), 20, 21, 22, 23, 24, 25], "completion_mask": [0] * 8 + [1] * 6, "advantage": 1.0},
    {
        "input_ids": [*range(8), 30, 31, 32, 33, 40, 41],
        "completion_mask": [0] * 8 + [1] * 4 + [0] * 2,
        "advantage": 1.0,
    },
    {"input_ids": [*range(8), 30, 31, 32, 33, 50, 51, 52, 53], "completion_mask": [0] * 8 + [1] * 8, "advantage": 0.0},
]
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 4, 42  # margins of the tree's canvas


def pixel(page, canvas, x, y):
    """The colour of a canvas at a place in CSS pixels, as #rrggbb."""
    return page.evaluate(
        """([name, x, y]) => {
          const canvas = document.getElementById(name), ratio = window.devicePixelRatio;
          const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
          const pen = copy.getContext("2d", { willReadFrequently: true });
          pen.drawImage(canvas, -Math.round(x * ratio), -Math.round(y * ratio));
          const at = pen.getImageData(0, 0, 1, 1).data;
          return "#" + [...at.slice(0, 3)].map((each) => each.toString(16).padStart(2, "0")).join("");
        }""",
        [canvas, x, y],
    )


def theme(page, name):
    return page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")


def place(page, depth, row, reach=16, rows=3):
    """Where a depth and a row of samples lie on the canvas of the tree."""
    box = page.locator("#icicle").bounding_box()
    width, height = box["width"] - LEFT - RIGHT, box["height"] - TOP - BOTTOM
    return LEFT + width * depth / reach, TOP + height * row / rows


def small():
    return treepack.pack(SMALL, max_tokens=32, order="first_seen")
