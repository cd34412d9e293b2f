import { Popover } from "radix-ui";
import { formatCount } from "../lib/format";
import { Button } from "../ui/Button";
import styles from "./ContextMeter.module.css";
import type { AssistantMessage, Conversation, Message } from "./types";
import { useContextLength } from "./useContextLength";

/** How full the context was after the last answer, and how much of its prompt came from the cache. */
export function ContextMeter({ conversation, path }: { conversation: Conversation; path: readonly Message[] }) {
  const last = path.findLast((message): message is AssistantMessage => message.role === "assistant" && !!message.stats);
  const context = useContextLength(conversation.settings.model || (last?.model ?? ""));
  if (!last?.stats) return null;
  const { promptTokens, answerTokens, cachedTokens } = last.stats;
  const used = promptTokens + answerTokens;
  const part = context ? Math.min(1, used / context) : null;
  const percent = part === null ? null : `${Math.round(part * 100)} %`;
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button
          kind="quiet"
          className={styles.meter ?? ""}
          aria-label={`Context: ${percent ?? formatCount(used)} used`}
        >
          <Ring part={part ?? 0} />
          <span className={styles.percent}>{percent ?? formatCount(used)}</span>
        </Button>
      </Popover.Trigger>
      <Popover.Portal>
        <Popover.Content
          aria-label="Context"
          className={styles.details ?? ""}
          align="end"
          sideOffset={6}
          collisionPadding={8}
        >
          <h2>Context</h2>
          <dl>
            <Row label="Used" value={context ? `${formatCount(used)} of ${formatCount(context)}` : formatCount(used)} />
            <Row label="Last prompt" value={formatCount(promptTokens)} />
            <Row label="of it from the cache" value={formatCount(cachedTokens)} />
            <Row label="Last answer" value={formatCount(answerTokens)} />
          </dl>
          {part !== null && part > 0.9 && <p>It is almost full. Start a new chat, or edit an early message.</p>}
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

function Row({ label, value }: { label: string; value: string }) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>{value}</dd>
    </div>
  );
}

const ROUND = 2 * Math.PI * 6;

function Ring({ part }: { part: number }) {
  return (
    <svg viewBox="0 0 16 16" aria-hidden="true" className={part > 0.9 ? styles.full : undefined}>
      <circle cx="8" cy="8" r="6" className={styles.track} />
      <circle cx="8" cy="8" r="6" className={styles.used} strokeDasharray={`${part * ROUND} ${ROUND}`} />
    </svg>
  );
}
