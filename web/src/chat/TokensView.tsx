import { Popover } from "radix-ui";
import { type KeyboardEvent, memo, useMemo, useRef, useState } from "react";
import { branchAnswer } from "./answering";
import styles from "./TokensView.module.css";
import {
  branchAt,
  canBranch,
  cutTokens,
  formatProbability,
  type Piece,
  probability,
  shadeOf,
  spellToken,
} from "./tokens";
import type { AssistantMessage, Candidate, Token } from "./types";

const CLOSE_MS = 250;
const RUN = 32;

/** An answer's tokens, shaded by their probability. Hover, focus or a click shows what else could have stood there. */
export function TokensView({ message, growing }: { message: AssistantMessage; growing: boolean }) {
  const pieces = useMemo(() => cutTokens(message.content, message.tokens ?? []), [message.content, message.tokens]);
  const [active, setActive] = useState<number | null>(null);
  const anchor = useRef<HTMLElement | null>(null);
  const timer = useRef(0);
  const show = (element: Element | null) => {
    window.clearTimeout(timer.current);
    if (!(element instanceof HTMLElement) || element.dataset.token === undefined) return;
    anchor.current = element;
    setActive(Number(element.dataset.token));
  };
  const hideSoon = () => {
    window.clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setActive(null), CLOSE_MS);
  };
  const keep = () => window.clearTimeout(timer.current);
  const token = active === null ? undefined : message.tokens?.[active];
  const choose = (candidate: Candidate) => {
    const branch = active === null ? null : branchAt(message, active, candidate);
    setActive(null);
    if (branch) branchAnswer(message, branch.content, branch.tokens);
  };
  return (
    <Popover.Root open={token !== undefined} onOpenChange={(open) => !open && setActive(null)}>
      <Popover.Anchor virtualRef={anchor as React.RefObject<HTMLElement>} />
      <p className={styles.legend}>
        {SHADES.map(([shade, text]) => (
          <span key={shade}>
            <i className={styles[shade]} aria-hidden="true" /> {text}
          </span>
        ))}
        <span>Point at a token, or move with the arrow keys, to see what else might have stood there.</span>
      </p>
      {/* biome-ignore lint/a11y/noStaticElementInteractions: the tokens inside are the buttons; their events are heard here. */}
      <div
        className={styles.tokens}
        dir="auto"
        onPointerOver={(event) => show(event.target as Element)}
        onPointerLeave={hideSoon}
        onFocus={(event) => show(event.target)}
        onClick={(event) => show(event.target as Element)}
        onBlur={hideSoon}
        onKeyDown={(event) => {
          moveFocus(event);
          if (event.key !== "Enter") return;
          event.preventDefault();
          show(event.target as Element);
          requestAnimationFrame(focusAlternative);
        }}
      >
        {cutRuns(pieces).map((run, index, all) => (
          <TokenRun
            // biome-ignore lint/suspicious/noArrayIndexKey: tokens never change places.
            key={index}
            pieces={run}
            first={index === 0}
            growing={growing && index === all.length - 1}
          />
        ))}
      </div>
      {token && (
        <Popover.Portal>
          <Popover.Content
            className={styles.panel ?? ""}
            sideOffset={4}
            collisionPadding={8}
            aria-label="What else could stand here"
            onFocusOutside={(event) => event.preventDefault()}
            onEscapeKeyDown={() => anchor.current?.focus()}
            onFocus={keep}
            onBlur={hideSoon}
            onOpenAutoFocus={(event) => event.preventDefault()}
            onPointerEnter={keep}
            onPointerLeave={hideSoon}
            onCloseAutoFocus={(event) => event.preventDefault()}
          >
            <Alternatives token={token} onChoose={growing ? null : choose} />
          </Popover.Content>
        </Popover.Portal>
      )}
    </Popover.Root>
  );
}

/** The shades from likely to surprising, with the probabilities that `shadeOf` gives them to. */
const SHADES = [
  ["shade0", "over 90 %"],
  ["shade1", "60 to 90 %"],
  ["shade2", "30 to 60 %"],
  ["shade3", "10 to 30 %"],
  ["shade4", "less"],
] as const;

const TokenRun = memo(
  function TokenRun({ pieces, first }: { pieces: readonly Piece[]; first: boolean; growing: boolean }) {
    const start = pieces.findIndex((piece) => piece.index !== null);
    return (
      <div>
        {pieces.map((piece, at) =>
          piece.token === null ? (
            // biome-ignore lint/suspicious/noArrayIndexKey: tokens never change places.
            <span key={at}>{piece.text}</span>
          ) : (
            // biome-ignore lint/a11y/useSemanticElements: a real button cannot be broken over lines within a text.
            <span
              // biome-ignore lint/suspicious/noArrayIndexKey: tokens never change places.
              key={at}
              role="button"
              tabIndex={first && at === start ? 0 : -1}
              data-token={piece.index}
              className={styles[`shade${shadeOf(piece.token.logprob)}`]}
              aria-label={`${spellToken(piece.text)}, ${formatProbability(probability(piece.token.logprob))}`}
            >
              {piece.text}
            </span>
          ),
        )}
      </div>
    );
  },
  (a, b) => !a.growing && !b.growing && isSameRun(a.pieces, b.pieces),
);

function isSameRun(a: readonly Piece[], b: readonly Piece[]): boolean {
  return (
    a.length === b.length && a.every((piece, index) => piece.token === b[index]?.token && piece.text === b[index]?.text)
  );
}

/** The pieces in runs that end with a line: only the last one is laid out again while an answer grows. */
function cutRuns(pieces: readonly Piece[]): (readonly Piece[])[] {
  const runs: (readonly Piece[])[] = [];
  let from = 0;
  pieces.forEach((piece, index) => {
    if (index - from < RUN || !piece.text.endsWith("\n")) return;
    runs.push(pieces.slice(from, index + 1));
    from = index + 1;
  });
  return from < pieces.length ? [...runs, pieces.slice(from)] : runs;
}

function focusAlternative(): void {
  document.querySelector<HTMLElement>("[data-alternative]:not(:disabled)")?.focus();
}

/** The arrow keys go from token to token. */
function moveFocus(event: KeyboardEvent<HTMLElement>): void {
  const all = [...event.currentTarget.querySelectorAll<HTMLElement>("[data-token]")];
  const at = all.indexOf(event.target as HTMLElement);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (at >= 0 && step !== undefined) {
    event.preventDefault();
    all[Math.max(0, Math.min(all.length - 1, at + step))]?.focus();
  }
}

/** What could have stood in a token's place; a choice makes a branch that goes on from there. */
function Alternatives({ token, onChoose }: { token: Token; onChoose: ((candidate: Candidate) => void) | null }) {
  const isListed = token.top.some((candidate) => candidate.text === token.text);
  const all = isListed ? token.top : [token, ...token.top];
  return (
    <>
      <ul>
        {all.map((candidate, index) => {
          const isChosen = candidate.text === token.text && candidate.logprob === token.logprob;
          const share = probability(candidate.logprob);
          return (
            // biome-ignore lint/suspicious/noArrayIndexKey: two parts of characters may be spelt alike.
            <li key={index}>
              <button
                type="button"
                data-alternative
                disabled={isChosen || token.at === null || !canBranch(candidate) || onChoose === null}
                aria-current={isChosen ? "true" : undefined}
                onClick={() => onChoose?.(candidate)}
              >
                <code>{spellToken(candidate.text)}</code>
                {share >= 0.01 && <span className={styles.bar} style={{ width: `${share * 100}%` }} />}
                <span className={styles.share}>{formatProbability(share)}</span>
              </button>
            </li>
          );
        })}
      </ul>
      <p>{onChoose ? "Choose one to branch the answer there." : "Branch once the answer is complete."}</p>
    </>
  );
}
