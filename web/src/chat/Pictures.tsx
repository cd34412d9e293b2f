import { X } from "lucide-react";
import { useState } from "react";
import { IconButton } from "../ui/Button";
import { Dialog } from "../ui/Dialog";
import styles from "./Pictures.module.css";
import type { Picture } from "./types";

/** The pictures of a message; small, with a button each, while they can be removed. Later a click enlarges one. */
export function Pictures({ pictures, onRemove }: { pictures: readonly Picture[]; onRemove?: (index: number) => void }) {
  const [shown, setShown] = useState<Picture | null>(null);
  if (pictures.length === 0) return null;
  return (
    <>
      <ul className={`${styles.pictures} ${onRemove ? styles.small : ""}`} aria-label="Pictures of the message">
        {pictures.map((picture, index) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: one picture may be there twice.
          <li key={index}>
            {onRemove ? (
              <>
                <Drawn {...picture} />
                <IconButton label={`Remove ${picture.name}`} small onClick={() => onRemove(index)}>
                  <X />
                </IconButton>
              </>
            ) : (
              <button type="button" aria-label={`Enlarge ${picture.name}`} onClick={() => setShown(picture)}>
                <Drawn {...picture} />
              </button>
            )}
          </li>
        ))}
      </ul>
      <Dialog wide open={shown !== null} title={shown?.name ?? ""} onClose={() => setShown(null)}>
        {shown && (
          <div className={styles.large}>
            <Drawn {...shown} />
          </div>
        )}
      </Dialog>
    </>
  );
}

function Drawn({ name, url, width, height }: Picture) {
  return <img src={url} alt={name} title={name} width={width} height={height} />;
}
