import { FastForward, RefreshCw } from "lucide-react";
import { useMemo } from "react";
import { useConnection } from "../api/connection";
import { useKept } from "../lib/kept";
import { namePassage } from "../lookup/quote";
import { Button, IconButton } from "../ui/Button";
import { type Cited, CitedTexts } from "../ui/Citation";
import { Markdown } from "../ui/Markdown";
import { Notice } from "../ui/Notice";
import styles from "./AnswerView.module.css";
import { answer, branchAnswer, continueAnswer, continueAsText, type Run } from "./answering";
import { CallsView } from "./CallsView";
import { EditBox } from "./EditBox";
import { MessageActions } from "./MessageActions";
import { Reasoning } from "./Reasoning";
import { StatsLine } from "./StatsLine";
import { TokensView } from "./TokensView";
import type { Tree } from "./tree";
import type { AssistantMessage, Status } from "./types";
import { useAnswer, useMaybe } from "./useThread";

interface Props {
  message: AssistantMessage;
  tree: Tree;
  showTokens: boolean;
  isLast: boolean;
}

/** An answer of the model, while it grows and afterwards. */
export function AnswerView({ message: stored, tree, showTokens, isLast }: Props) {
  const { message, status, run } = useAnswer(stored);
  const [editing, setEditing] = useKept(`editing ${message.id}`, false);
  const growing = status === "growing";
  const cited = useMemo(() => listCited(tree, message.parent), [tree, message.parent]);
  const thinking = useMaybe(run?.thinking) ?? false;
  if (editing)
    return (
      <article className={styles.answer} aria-label="Answer">
        <EditBox
          id={message.id}
          label="Answer"
          text={message.content}
          onCancel={() => setEditing(false)}
          actions={{
            "Save as a version": (text) => branchAnswer(message, text),
            "Save and continue": (text) => branchAnswer(message, text, []),
          }}
        />
      </article>
    );
  return (
    <article className={styles.answer} aria-label="Answer" aria-busy={growing}>
      {message.reasoning && (
        <Reasoning id={message.id} text={message.reasoning} ms={message.reasoningMs ?? 0} thinking={thinking} />
      )}
      {run && <Waiting run={run} message={message} />}
      {showTokens && message.tokens ? (
        <TokensView message={message} growing={growing} />
      ) : (
        message.content && (
          <CitedTexts value={cited}>
            <Markdown text={message.content} growing={growing} />
          </CitedTexts>
        )
      )}
      {message.calls && <CallsView message={message} open={isLast && status === "done"} />}
      {!growing && <Ending message={message} status={status} />}
      {growing && <StatsLine message={message} growing />}
      {!growing && (
        <MessageActions
          message={message}
          tree={tree}
          onEdit={() => setEditing(true)}
          end={<StatsLine message={message} growing={false} />}
        >
          <IconButton small label="Regenerate" onClick={() => void answer(message.conversation, message.parent)}>
            <RefreshCw />
          </IconButton>
          {isLast && !message.calls && (
            <IconButton small label="Continue" onClick={() => void continueAnswer(message)}>
              <FastForward />
            </IconButton>
          )}
        </MessageActions>
      )}
    </article>
  );
}

/** The passages that went along with the question that an answer is to. */
function listCited(tree: Tree, parent: string | null): Cited[] {
  for (let id = parent; id !== null; ) {
    const message = tree.messages.get(id);
    if (message?.role === "user")
      return message.passages?.map((passage) => ({ name: namePassage(passage), text: passage.text })) ?? NONE_CITED;
    id = message?.parent ?? null;
  }
  return NONE_CITED;
}

const NONE_CITED: Cited[] = [];

/** What happens before the first token: how much of the prompt has been read. */
function Waiting({ run, message }: { run: Run; message: AssistantMessage }) {
  const progress = useMaybe(run.progress);
  if (message.content || message.reasoning || message.calls) return null;
  const reads = progress && progress.total > 512 && progress.processed < progress.total;
  return (
    <p className={styles.waiting}>
      <span className={styles.dots} aria-hidden="true">
        <i />
        <i />
        <i />
      </span>
      {reads ? (
        <>
          Reads the prompt
          <progress value={progress.processed} max={progress.total} aria-label="Tokens of the prompt that are read" />
        </>
      ) : (
        <span className="hidden-text">Waits for the first token</span>
      )}
    </p>
  );
}

const WHY_NO_CHAT =
  "This is a base model: it has no chat template, so it cannot chat, but it can continue a text that you begin.";

/** How the answer ended, where that is not simply its end, with what can be done. */
function Ending({ message, status }: { message: AssistantMessage; status: Status }) {
  const goOn = (text: string) => (
    <Button small onClick={() => void continueAnswer(message)}>
      {text}
    </Button>
  );
  const isBase = /no chat template/.test(message.error ?? "");
  const asText = (
    <Button small onClick={() => void continueAsText(message)}>
      Continue as text
    </Button>
  );
  const isLost = useConnection() === "lost"; // then the whole page says so
  const isEmpty = !message.content && !message.reasoning && !message.calls;
  if (status === "failed")
    return (
      <Notice kind="error" actions={isBase ? asText : goOn("Try again")}>
        {isBase ? WHY_NO_CHAT : (message.error ?? "There is no answer.")}
      </Notice>
    );
  if (status === "interrupted")
    return (
      <Notice kind="warning" actions={goOn(isEmpty ? "Try again" : "Continue the answer")}>
        {!isLost && (message.error ?? "The page was left in the middle of this answer.")}
        {!isEmpty && " What had come is kept."}
      </Notice>
    );
  if (status === "stopped")
    return (
      <Notice kind="plain" actions={goOn(isEmpty ? "Ask again" : "Continue the answer")}>
        You stopped {isEmpty ? "before the first token" : "here"}.
      </Notice>
    );
  if (status === "length")
    return (
      <Notice kind="plain" actions={goOn("Continue the answer")}>
        The answer is as long as it may be: the setting “Max tokens” or the context ended it.
      </Notice>
    );
  if (isEmpty) return <p className={styles.empty}>The model answered nothing.</p>;
  return null;
}
