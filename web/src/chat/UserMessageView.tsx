import { useEffect, useRef } from "react";
import { formatCount } from "../lib/format";
import { useKept } from "../lib/kept";
import { useStore } from "../lib/store";
import { findPassages } from "../lookup/folders";
import { Quoted } from "../lookup/Quoted";
import { Button } from "../ui/Button";
import { branchMessage, countUsed } from "./answering";
import { FileChips } from "./Composer";
import { EditBox } from "./EditBox";
import { editing as editWanted } from "./editing";
import { findConversation, treeOf } from "./library";
import { MessageActions } from "./MessageActions";
import { Pictures } from "./Pictures";
import { listPath, type Tree } from "./tree";
import type { UserMessage } from "./types";
import styles from "./UserMessageView.module.css";

const LONG = 2_000;

/** What the person wrote, as plain text; of a long text only the beginning, until all is asked for. */
export function UserMessageView({ message, tree }: { message: UserMessage; tree: Tree }) {
  const [editing, setEditing] = useKept(`editing ${message.id}`, false);
  const [whole, setWhole] = useKept(`whole ${message.id}`, false);
  const lookup = useRef<AbortController | null>(null);
  const wanted = useStore(editWanted) === message.id;
  useEffect(() => {
    if (!wanted) return;
    editWanted.set(null);
    setEditing(true);
  }, [wanted, setEditing]);
  const askAgain = async (text: string) => {
    const { conversation, parent } = message;
    const model = findConversation(conversation)?.settings.model ?? "";
    const used = countUsed(listPath(tree, parent));
    const own = new AbortController();
    lookup.current = own;
    const found = await findPassages(conversation, text, model, used, own.signal);
    own.signal.throwIfAborted();
    // It may have been deleted meanwhile: the new version would stand behind a message that is not there.
    const now = treeOf(conversation).get();
    if (!findConversation(conversation) || (parent !== null && !now?.messages.has(parent)))
      throw new Error("The message before this one is gone.");
    branchMessage(message, text, found);
  };
  const isLong = message.content.length > LONG;
  if (editing)
    return (
      <article className={styles.message} aria-label="You">
        <EditBox
          id={message.id}
          label="Your message"
          text={message.content}
          onCancel={() => {
            lookup.current?.abort();
            setEditing(false);
          }}
          actions={{ "Save and ask again": askAgain }}
        />
      </article>
    );
  return (
    <article className={styles.message} aria-label="You">
      <div className={styles.bubble}>
        <Pictures pictures={message.pictures ?? []} />
        <FileChips files={message.files ?? []} />
        {message.content && (
          <p className={styles.text} dir="auto">
            {isLong && !whole ? `${message.content.slice(0, LONG)}…` : message.content}
          </p>
        )}
        {isLong && (
          <Button kind="quiet" small aria-expanded={whole} onClick={() => setWhole(!whole)}>
            {whole ? "Show less" : `Show all ${formatCount(message.content.length)} characters`}
          </Button>
        )}
        {message.passages && <Quoted id={message.id} passages={message.passages} />}
      </div>
      <MessageActions message={message} tree={tree} onEdit={() => setEditing(true)} align="end" />
    </article>
  );
}
