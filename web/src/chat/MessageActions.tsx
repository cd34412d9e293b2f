import { Check, ChevronLeft, ChevronRight, Copy, Pencil, Trash2 } from "lucide-react";
import { type ReactNode, useState } from "react";
import { copyText } from "../lib/copy";
import { IconButton } from "../ui/Button";
import { removeMessage, showMessage } from "./library";
import styles from "./MessageActions.module.css";
import { listSiblings, type Tree } from "./tree";
import type { Message } from "./types";

interface Props {
  message: Message;
  tree: Tree;
  onEdit: () => void;
  align?: "start" | "end";
  /** Further buttons. */
  children?: ReactNode;
  /** What stands at the end of the row. */
  end?: ReactNode;
}

/** The row below a message: its versions, copy, edit, delete. */
export function MessageActions({ message, tree, onEdit, align = "start", children, end }: Props) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    setCopied(await copyText(message.content));
    setTimeout(() => setCopied(false), 1_500);
  };
  return (
    <div className={`${styles.actions} ${styles[align]}`}>
      <Versions message={message} tree={tree} />
      {children}
      <IconButton small label={copied ? "Copied" : "Copy"} onClick={copy}>
        {copied ? <Check /> : <Copy />}
      </IconButton>
      <IconButton small label="Edit" onClick={onEdit}>
        <Pencil />
      </IconButton>
      <IconButton small label="Delete" onClick={() => removeMessage(message.conversation, message.id)}>
        <Trash2 />
      </IconButton>
      {end}
    </div>
  );
}

/** "2 of 3": goes through the versions of a message. */
function Versions({ message, tree }: { message: Message; tree: Tree }) {
  const { ids, index } = listSiblings(tree, message.id);
  if (ids.length < 2) return null;
  const show = (at: number) => {
    const id = ids[at];
    if (id !== undefined) showMessage(message.conversation, id);
  };
  return (
    <fieldset className={styles.versions} aria-label="Versions">
      <IconButton small label="Version before" disabled={index === 0} onClick={() => show(index - 1)}>
        <ChevronLeft />
      </IconButton>
      <span>
        {index + 1} of {ids.length}
      </span>
      <IconButton small label="Next version" disabled={index === ids.length - 1} onClick={() => show(index + 1)}>
        <ChevronRight />
      </IconButton>
    </fieldset>
  );
}
