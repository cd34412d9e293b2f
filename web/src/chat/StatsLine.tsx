import { Info } from "lucide-react";
import { Popover } from "radix-ui";
import { formatCount, formatRate, formatSeconds } from "../lib/format";
import { Button } from "../ui/Button";
import { usePortalHost } from "../ui/portal";
import styles from "./StatsLine.module.css";
import type { AssistantMessage } from "./types";

/** How long an answer is and how fast it came, in one quiet line; the other figures open from it. */
export function StatsLine({ message, growing }: { message: AssistantMessage; growing: boolean }) {
  const host = usePortalHost();
  const { stats } = message;
  if (!stats) return null;
  const speed = stats.tokensPerSecond === null ? "" : ` · ${formatRate(stats.tokensPerSecond)}`;
  const line = `${formatCount(stats.answerTokens)} tokens${speed}`;
  if (growing) return <p className={styles.line}>{line}</p>;
  return (
    <Popover.Root>
      <Popover.Trigger asChild>
        <Button kind="quiet" small className={styles.line ?? ""} aria-label={`Figures: ${line}`}>
          {line} <Info aria-hidden="true" />
        </Button>
      </Popover.Trigger>
      <Popover.Portal container={host}>
        <Popover.Content
          className={styles.details ?? ""}
          aria-label="Figures of this answer"
          align="end"
          sideOffset={4}
          collisionPadding={8}
        >
          <Figures message={message} stats={stats} />
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

function Figures({ message, stats }: { message: AssistantMessage; stats: NonNullable<AssistantMessage["stats"]> }) {
  const figures: [string, string | null, string][] = [
    ["Model", message.model || null, ""],
    [
      "First token",
      stats.firstTokenMs === null ? null : formatSeconds(stats.firstTokenMs / 1000),
      "after the question",
    ],
    ["Speed", stats.tokensPerSecond === null ? null : formatRate(stats.tokensPerSecond), ""],
    ["Answer", `${formatCount(stats.answerTokens)} tokens`, ""],
    ["Prompt", `${formatCount(stats.promptTokens)} tokens`, "the conversation so far"],
    [
      "Cached",
      `${formatCount(stats.cachedTokens)} of ${formatCount(stats.promptTokens)}`,
      "prompt tokens not computed again",
    ],
    ["Waited", stats.queueMs >= 1 ? formatSeconds(stats.queueMs / 1000) : null, "behind other answers"],
    ["Seed", message.seed === undefined ? null : String(message.seed), "set it to get this answer again"],
  ];
  return (
    <dl>
      {figures.map(
        ([term, text, hint]) =>
          text !== null && (
            <div key={term}>
              <dt>{term}</dt>
              <dd>
                {text}
                {hint && <small>{hint}</small>}
              </dd>
            </div>
          ),
      )}
    </dl>
  );
}
