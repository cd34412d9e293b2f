import { X } from "lucide-react";
import { IconButton } from "../ui/Button";
import styles from "./Pictures.module.css";
import type { Picture } from "./types";

/** The pictures of a message; small, with a button each, while they can be removed. */
export function Pictures({ pictures, onRemove }: { pictures: readonly Picture[]; onRemove?: (index: number) => void }) {
  if (pictures.length === 0) return null;
  return (
    <ul className={`${styles.pictures} ${onRemove ? styles.small : ""}`} aria-label="Pictures of the message">
      {pictures.map(({ name, url, width, height }, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: one picture may be there twice.
        <li key={index}>
          <img src={url} alt={name} title={name} width={width} height={height} />
          {onRemove && (
            <IconButton label={`Remove ${name}`} small onClick={() => onRemove(index)}>
              <X />
            </IconButton>
          )}
        </li>
      ))}
    </ul>
  );
}
