import { useEffect, useState } from "react";
import { useMedia } from "../lib/media";
import { useStore } from "../lib/store";
import { theme } from "../lib/theme";
import { Button } from "./Button";
import { CodeBlock } from "./CodeBlock";
import { drawDiagram, findDrawing } from "./diagrams";

/** A text that still grows is not drawn before it has stood still so long. */
const PAUSE_MS = 250;

/** A diagram in Mermaid, as a picture or as its source; where it cannot be drawn, its source and why. */
export function Diagram({ code }: { code: string }) {
  const chosen = useStore(theme);
  const isDark = useMedia("(prefers-color-scheme: dark)");
  const shade = chosen === "system" ? (isDark ? "dark" : "light") : chosen;
  const [asSource, setAsSource] = useState(false);
  const [, setDrawn] = useState(0);
  const drawing = findDrawing(code, shade);
  useEffect(() => {
    const known = findDrawing(code, shade);
    if (known && !("again" in known)) return;
    const timer = setTimeout(async () => {
      await drawDiagram(code, shade);
      setDrawn((count) => count + 1);
    }, PAUSE_MS);
    return () => clearTimeout(timer);
  }, [code, shade]);
  const isDrawn = drawing !== null && "svg" in drawing;
  return (
    <CodeBlock
      code={code}
      language="mermaid"
      note={drawing && "error" in drawing ? `This diagram cannot be drawn. ${drawing.error}` : undefined}
      tools={
        isDrawn && (
          <Button kind="quiet" small aria-pressed={asSource} onClick={() => setAsSource(!asSource)}>
            Source
          </Button>
        )
      }
      picture={
        isDrawn &&
        !asSource && (
          <img
            src={`data:image/svg+xml,${encodeURIComponent(drawing.svg)}`}
            width={Math.round(drawing.width)}
            height={Math.round(drawing.height)}
            alt="Diagram, which the source describes"
          />
        )
      }
    />
  );
}
