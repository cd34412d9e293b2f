"""PDF files, written by hand."""

from __future__ import annotations

from collections.abc import Sequence


def make_pdf(texts: Sequence[str], size: tuple[int, int] = (200, 100)) -> bytes:
    """A page for each text; one with an empty text shows a gray square instead."""
    pages = [f"{5 + 2 * index} 0 R" for index in range(len(texts))]
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{' '.join(pages)}] /Count {len(texts)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, text in enumerate(texts):
        drawn = f"BT /F1 12 Tf 10 50 Td ({text}) Tj ET" if text else "0.5 g 20 20 60 60 re f"
        objects += [
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size[0]} {size[1]}] /Contents {4 + 2 * index} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
        ]
    data, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{one}\nendobj\n".encode()
    rows = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return data + end.encode() + f"startxref\n{len(data)}\n%%EOF\n".encode()
