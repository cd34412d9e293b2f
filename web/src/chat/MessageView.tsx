import { memo } from "react";
import { useKept } from "../lib/kept";
import { AnswerView } from "./AnswerView";
import { editResult } from "./answering";
import { EditBox } from "./EditBox";
import { MessageActions } from "./MessageActions";
import styles from "./MessageView.module.css";
import type { Tree } from "./tree";
import type { Message, ToolMessage } from "./types";
import { UserMessageView } from "./UserMessageView";

interface Props {
  message: Message;
  tree: Tree;
  showTokens: boolean;
  /** The message behind it on the branch that is shown. */
  next: Message | undefined;
}

/** One message of the conversation, with what can be done with it. */
export const MessageView = memo(function MessageView({ message, tree, showTokens, next }: Props) {
  if (message.role === "user") return <UserMessageView message={message} tree={tree} />;
  if (message.role === "tool") return <ResultView message={message} tree={tree} />;
  return <AnswerView message={message} tree={tree} showTokens={showTokens} isLast={next === undefined} />;
}, isSame);

function isSame(a: Props, b: Props): boolean {
  return (
    a.message === b.message &&
    a.showTokens === b.showTokens &&
    (a.next === undefined) === (b.next === undefined) &&
    a.tree.children.get(a.message.parent ?? "") === b.tree.children.get(b.message.parent ?? "")
  );
}

/** The result of a tool's call. */
function ResultView({ message, tree }: { message: ToolMessage; tree: Tree }) {
  const [editing, setEditing] = useKept(`editing ${message.id}`, false);
  return (
    <article className={styles.result} aria-label={`Result of ${message.name}`}>
      <p className={styles.name}>
        Result of <code>{message.name}</code>
      </p>
      {editing ? (
        <EditBox
          id={message.id}
          label={`Result of ${message.name}`}
          text={message.content}
          onCancel={() => setEditing(false)}
          actions={{ "Save and ask again": (text) => void editResult(message, text) }}
        />
      ) : (
        <pre dir="auto">{message.content}</pre>
      )}
      <MessageActions message={message} tree={tree} onEdit={() => setEditing(true)} />
    </article>
  );
}
